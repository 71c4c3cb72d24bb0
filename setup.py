"""Packaging: `pip install .`; the examples and the tests need no installation."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Read as text: importing the package would import its needs.
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_lengen/__init__.py").read_text())

setup(
    name="megatron-lengen",
    version=VERSION.group(1),
    description="Megatron-Core training of language models that work beyond their training length",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_lengen", "megatron_lengen.*"]),
    py_modules=["pretrain_gpt"],
    package_data={"megatron_lengen.ops": ["*.cpp", "*.h"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        "numpy",
        "packaging>=24.2",
        "psutil",
        "transformers>=5.0,<6",
        "tokenizers",
        "safetensors>=0.5",
        "huggingface_hub",
        "sentencepiece>=0.2",
        "tqdm",
        "matplotlib",
    ],
    extras_require={
        "parquet": ["pyarrow"],
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        "te": ["transformer-engine[pytorch]"],
        "mamba": ["mamba-ssm", "causal-conv1d", "einops"],
        "deepspeed": ["deepspeed"],
        "eval": ["lm-eval"],
        "dev": ["pytest", "pytest-xdist", "scipy", "ruff", "mypy"],
    },
)
