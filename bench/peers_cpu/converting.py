"""Converts the checkpoint to the format of each engine with the engine's own tools, and keeps it
for the next run."""

import hashlib
from pathlib import Path

from bench import children
from bench.peers_cpu.checkpoints import Checkpoint
from bench.peers_cpu.engines import ADAPTERS, Engine, ModelFormat
from bench.peers_cpu.environments import llama_cpp_folder, llama_cpp_sources
from bench.peers_cpu.serving import EngineFailedError, first_line_of_why


def converted(engine: Engine, checkpoint: Checkpoint, peers: Path) -> Path:
    """The model in the engine's format; made on first use.

    Raises:
        EngineFailedError: an environment isn't installed, or its tools can't convert this
            checkpoint.
    """
    if engine.model_format == "safetensors":
        return checkpoint.folder
    if engine.model_format == "gguf-q4_k_m" and checkpoint.gguf:
        return checkpoint.gguf
    is_gguf = engine.model_format.startswith("gguf")
    folder = llama_cpp_folder(peers) if is_gguf else peers / str(engine.environment)
    if not folder.is_dir():
        raise EngineFailedError(f"not installed: python -m bench.peers_cpu install {folder.name}")
    return _make(engine.model_format, folder, checkpoint, peers / "models" / _key(checkpoint))


def _make(model_format: ModelFormat, folder: Path, checkpoint: Checkpoint, models: Path) -> Path:
    """Convert into the folder ``models``, unless that is done, with the tools of the environment
    ``folder``."""
    made = models / f"{model_format}{'.gguf' if model_format.startswith('gguf') else ''}"
    if made.exists():
        return made
    models.mkdir(parents=True, exist_ok=True)
    source = checkpoint.folder
    if model_format in ("gguf-q8_0", "gguf-q4_k_m"):
        source = _make("gguf-bf16", folder, checkpoint, models)
    unfinished = models / f"{model_format}.part"
    command = _command(model_format, folder, source, unfinished)
    if model_format == "gguf-bf16" and checkpoint.gguf:
        # Its tokenizer is in the file only; the weights are those of the folder.
        quantize = str(folder / "bin" / "llama-quantize")
        command = [quantize, "--allow-requantize", str(checkpoint.gguf), str(unfinished), "BF16"]
    _run(command, models / f"{model_format}.log")
    unfinished.rename(made)
    return made


def _key(checkpoint: Checkpoint) -> str:
    """Differs when the checkpoint does."""
    weights = (checkpoint.folder / "model.safetensors").stat()
    config = (checkpoint.folder / "config.json").read_text()
    identity = f"{checkpoint.folder.resolve()} {config} {weights.st_size} {weights.st_mtime_ns}"
    return f"{checkpoint.folder.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _command(model_format: ModelFormat, folder: Path, source: Path, target: Path) -> list[str]:
    binaries = folder / "bin"
    match model_format:
        case "openvino":
            # Without a weight format it keeps the checkpoint's bfloat16.
            export = [str(binaries / "optimum-cli"), "export", "openvino", "--model", str(source)]
            return [*export, "--task", "text-generation-with-past", str(target)]
        case "gguf-bf16":
            script = str(ADAPTERS / "gguf_conversion.py")
            tools = str(llama_cpp_sources(folder))
            return [str(binaries / "python"), script, tools, str(source), str(target)]
        case _:
            kind = model_format.removeprefix("gguf-").upper()
            return [str(binaries / "llama-quantize"), str(source), str(target), kind]


def _run(command: list[str], log: Path) -> None:
    print(f"converting: {' '.join(command)}", flush=True)
    done = children.run(command, capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        why = first_line_of_why(done.stderr or done.stdout)
        raise EngineFailedError(f"conversion: {why} (status {done.returncode}; {log})")
