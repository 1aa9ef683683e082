"""LLM, AsyncLLM and LLMEngine."""
