"""Turns the packaged GGUF model into a folder that vLLM serves; run as a process of its own.

    python -m gateway.engine.convert GGUF_FILE OUT_DIR

It is a process because torch and transformers take a gigabyte that the gateway would never give back.
"""

import sys
from pathlib import Path


def convert(gguf_file: Path, out_dir: Path) -> None:
    """Writes bf16 safetensors, the configuration, the tokenizer and the chat template to `out_dir`.

    vLLM does not load this GGUF on a CPU, so the 4-bit weights are unpacked once; every mark of the quantisation has
    to go, or the saved configuration would claim that the weights are still packed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(gguf_file.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file.name, dtype=torch.bfloat16)
    model.hf_quantizer = None
    model.is_quantized = False
    for holder, mark in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, mark):
            delattr(holder, mark)
    model.save_pretrained(str(out_dir))
    tokenizer.save_pretrained(str(out_dir))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
