"""What every route of the HTTP API needs: access, bodies, errors, encoding, connections and the OpenAPI document."""
