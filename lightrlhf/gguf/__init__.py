"""GGUF, the format of llama.cpp: files read and written, their tokenizers, and Ollama's Modelfile."""
