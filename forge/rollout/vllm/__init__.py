"""vLLM behind the `Engine` protocol: its own server processes, spoken to over HTTP. Nothing here imports vllm."""
