"""Request and response bodies, as OpenAPI documents them."""
