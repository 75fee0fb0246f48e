import hashlib, json

def row(n):
    return {"n": n, "hash": hashlib.sha256(str(n).encode()).hexdigest()}

rows = [row(n) for n in range(60000)]
print(hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest())
