"""Images of prompts: decoding, the checkpoint's processor, and the places of images in the text."""
