"""The pruners that come with compressx. Each is a plugin like any other and imports only the public API."""
