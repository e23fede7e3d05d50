"""Demo: a Gradio app to chat with trained models, compare them and collect votes."""
