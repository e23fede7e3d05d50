"""Teachers: language models from whose distribution a policy learns, and lessons by them."""
