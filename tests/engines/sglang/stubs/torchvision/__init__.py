"""A stub, see `absent`: SGLang imports it for models that see images."""

from absent import stand_in_for

__version__ = "0"
stand_in_for(__name__)
