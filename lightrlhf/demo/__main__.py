"""Entry point of `python -m lightrlhf.demo`."""

from lightrlhf.demo.page import main

main()
