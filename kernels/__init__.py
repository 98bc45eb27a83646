"""Device ops. Import-light on purpose: `import transformers` may execute this file."""
