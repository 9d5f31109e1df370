"""Adapters in pinned host memory. Needs torch and knows nothing of vLLM."""
