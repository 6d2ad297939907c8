"""The command line. One command a file; nothing here is imported by `import inductor_gqa`."""
