"""The OpenAI-compatible HTTP server: `app.build_app` makes the application, `serve.serve` gives it a socket."""
