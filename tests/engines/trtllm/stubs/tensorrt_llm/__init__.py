"""A fake of TensorRT-LLM, which does not run here: what the connector imports, by the interface of the release."""

__version__ = "1.4.0rc4"
