# Two environments, made once and reused: .venv (TensorFlow 2.21, Keras 3) and .venv-tf215 (TensorFlow 2.15, Keras 2).
PYTHON ?= python3
PACKAGES_tf221 = 'tensorflow==2.21.*' 'keras==3.15.*' 'tf_keras==2.21.*'
PACKAGES_tf215 = 'tensorflow==2.15.1' 'keras==2.15.*'
STAMP = .venv/installed
STAMP_215 = .venv-tf215/installed

.PHONY: demo bench test test-215 test-all lint clean

demo: $(STAMP)
	.venv/bin/python examples/demo.py

# About an hour. PyTorch is for reference: where it does not install, its rows are missing and the tables say so.
bench: $(STAMP)
	test -x .venv-torch/bin/python || $(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -c 'import torch' 2>/dev/null || .venv-torch/bin/pip install -q 'torch==2.13.0' numpy || true
	.venv/bin/python -m examples.benchmarks

test: $(STAMP)
	.venv/bin/python -m pytest

test-215: $(STAMP_215)
	.venv-tf215/bin/python -m pytest

# The primary target comes last, so that its summary closes the output.
test-all: test-215 test

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

$(STAMP): pyproject.toml Makefile
	$(call set-up,.venv,$(PACKAGES_tf221))

$(STAMP_215): pyproject.toml Makefile
	$(call set-up,.venv-tf215,$(PACKAGES_tf215))

# $(1): folder of the environment, $(2): the TensorFlow and Keras it is for.
define set-up
	@echo "Setting up $(1) (once; a few minutes)"
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -q --upgrade pip
	$(1)/bin/python -m pip install -q $(2) 'cmake<4' -e '.[test,examples]'
	$(1)/bin/caramel build-horovod
	touch $(1)/installed
endef

clean:
	rm -rf .venv .venv-tf215 .venv-torch build
