"""The files of LoRA adapters: peft's folders and GGUF files."""
