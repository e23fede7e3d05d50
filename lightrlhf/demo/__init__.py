"""Demo: a Gradio app to chat with trained models, compare them and collect votes."""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # both are read when gradio is imported
os.environ["GRADIO_RUN_HISTORY"] = "False"  # would keep questions and answers in the browser, or elsewhere
