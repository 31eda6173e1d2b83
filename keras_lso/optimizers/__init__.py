"""LARS, LAMB, NovoGrad and LARC, whose steps go by the norms of layers."""
