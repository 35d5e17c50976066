"""Says beforehand whether compression pays: profiles of clusters and models, and what is predicted from them."""
