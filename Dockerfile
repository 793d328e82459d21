# For a machine without Linux, such as a Mac, or without Python: `make container` builds and runs it.
# Its commands are the Makefile's.
FROM python:3.12-slim
# The compiler is for DeepSpeed's optimizers, git for variants and labs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /rlhf
COPY . .
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
RUN make install TORCH="$TORCH"
CMD ["make", "demo"]
