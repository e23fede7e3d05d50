"""The library's own engine behind the routes of vLLM and OpenAI, and the command that starts vLLM."""
