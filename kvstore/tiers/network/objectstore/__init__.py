"""Object stores: S3 and what speaks it, GCS, Azure."""
