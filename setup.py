import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.search(r'__version__ = "(.+)"', Path("lightrlhf/__init__.py").read_text(encoding="utf-8"))[1]

# Each bound is the release that `make test-oldest` installs for a part of the tests; constraints.txt has those of all.
EXTRAS = {
    "envs": ["gymnasium>=1.3"],
    "demo": ["gradio>=6.11", "starlette>=1.0", "markupsafe>=3.0", "pandas>=2.2"],
    "parse": ["textblob>=0.18"],
    "quantisation": ["bitsandbytes>=0.46.1"],
    "verify": ["math-verify[antlr4_13_2]>=0.8", "reasoning-gym>=0.1.25"],
    "gguf": ["gguf>=0.17"],
    "serve": ["starlette>=1.0", "uvicorn>=0.30", "pydantic>=2.10", "pydantic-core>=2.27"],
    "wandb": ["wandb>=0.19.10"],
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3.1",
        "pytest-xdist>=3.6.1",
        "hypothesis>=6.100",
        "ruff>=0.8",
        "mypy>=1.15",
        "types-pyyaml>=6.0.12",
        "gradio_client>=2.4",
        "httpx>=0.27",
        "psutil>=5.9",
        "nbclient>=0.10",
        "nbformat>=5.9",
        "ipykernel>=6.29",
        "openai>=2.0",
        "transformers[serving]>=5.17",
    ],
}
EXTRAS["all"] = sorted({package for packages in EXTRAS.values() for package in packages})  # what `make test` installs
EXTRAS["browser"] = ["playwright>=1.50", "axe-playwright-python>=0.1.4", "pillow>=10.0"]  # tests that drive Chromium
EXTRAS |= {"benepar": ["benepar>=0.2"], "stanza": ["stanza>=1.8"]}  # want models of their own, from a local folder
EXTRAS |= {"alfworld": [*EXTRAS["envs"], "textworld>=1.7", "alfworld>=0.4.2"]}  # partly compiled on the spot, minutes
EXTRAS |= {"flash": ["flash-attn>=2.7"]}  # needs CUDA, and is compiled where there is no wheel for torch's version

setup(
    name="lightrlhf",
    version=VERSION,
    description="RLHF algorithms on Lightning Fabric, each one a readable file that runs by itself",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["lightrlhf*", "datasets_prep*"]),
    package_data={
        "lightrlhf": ["py.typed"],
        "lightrlhf.data": ["*.jinja"],
        "lightrlhf.demo": ["assets/*"],
        "datasets_prep.cafe": ["base/*"],
    },
    install_requires=[
        "torch>=2.6",
        "lightning>=2.5",
        "torchmetrics>=1.5",
        "transformers>=5.17",
        "datasets>=3.0",
        "huggingface_hub>=1.5",
        "jinja2>=3.1",  # of transformers, for chat templates
        "numpy>=1.26",
        "packaging>=23",
        "regex>=2025.10.22",  # of transformers; patterns with a limit of time
        "pyarrow>=15.0",
        "tokenizers>=0.23.1",
        "safetensors>=0.8",
        "sentencepiece>=0.2.0",  # of transformers, for models whose tokenizer is a tokenizer.model
        "tensorboard>=2.15",  # also of torch.utils.tensorboard
        "jsonargparse[signatures]>=4.52",
        "shtab>=1.7",
        "peft>=0.19.1",
        "accelerate>=1.2",
        "nltk>=3.8",
        "matplotlib>=3.8",
        "tqdm>=4.66.3",
        # The maintained continuation of httpx, which huggingface_hub needs anyway. Not the client `openai`: rollout
        # servers have routes beside OpenAI's (token ids, new weights); each reply is read within limits on its length
        # and time, and is checked before it counts as an answer; a retry may go to another server.
        "httpx2>=2.12",
        "tenacity>=8.2",
        "rich>=13.8",
        "pyyaml>=6.0.2",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["lightrlhf=lightrlhf.__main__:script"]},
)
