"""Demo: a Gradio page to chat with trained models, compare them and collect votes."""
