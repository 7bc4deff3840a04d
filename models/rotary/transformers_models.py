NAMES = ""
def plan(model, impl): return []
