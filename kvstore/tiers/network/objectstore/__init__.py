"""The object store backend: S3 and compatible services, Google Cloud Storage, Azure."""
