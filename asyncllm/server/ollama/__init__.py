"""Ollama's routes over the same engine."""
