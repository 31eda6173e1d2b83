"""LARS, LAMB, NovoGrad and LARC, whose steps depend on the norms of layers."""
