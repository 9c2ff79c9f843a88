"""A fake of TensorRT-LLM, which does not run here: what the connector imports of the release."""

__version__ = "1.4.0rc4"
