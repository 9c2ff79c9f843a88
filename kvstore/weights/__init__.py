"""Names the weights of a model by the content of its files. Each file is read once per node.

Connectors use this through `kvstore.files_digest`, `kvstore.Weights` and `kvstore.WeightsNaming`.
"""
