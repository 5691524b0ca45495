"""The embedded engine: a real vLLM on this machine's CPU, serving the packaged SmolLM2-135M-Instruct."""
