"""Code that depends on private names in torch's compiler and dispatcher."""
