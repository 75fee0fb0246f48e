local count, n = {}, 1
for _ = 1, 3000000 * (arg[1] or 1) do
	n = (n * 1103515245 + 12345) % 2147483648
	count[n % 997] = (count[n % 997] or 0) + 1
end
local words = {}
for key = 0, 996 do
	words[#words + 1] = string.format("%d=%d", key, count[key] or 0)
end
print(table.concat(words, ","))
