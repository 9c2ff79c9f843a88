"""A stub, see `absent`: SGLang's compiled kernels. SGLang computes with torch instead, if it is told to."""

from absent import stand_in_for

stand_in_for(__name__)
