"""The FSDP2 backend: any causal language model of transformers as it is, its weights cut over ranks."""
