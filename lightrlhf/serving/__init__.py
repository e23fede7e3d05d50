"""The library's own engine behind the routes of vLLM and OpenAI, and the commands that start vLLM and SGLang."""
