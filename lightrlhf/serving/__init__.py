"""The library's own engine behind the routes of vLLM and OpenAI."""
