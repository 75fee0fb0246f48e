-- Sorting, formatting, matching and recursion, for the paths of Lua: work.lua ROUNDS
local n = tonumber(arg[1]) or 1
local function fib(x) if x < 2 then return x end return fib(x-1)+fib(x-2) end
for r = 1, n do
  local t = {}
  for i = 1, 200000 do t[i] = (i * 7919) % 100003 end
  table.sort(t)
  local s = {}
  for i = 1, 50000 do s[#s+1] = string.format("%d:%s", t[i], tostring(i)) end
  local j = table.concat(s, ",")
  local c = 0
  for w in j:gmatch("%d+:") do c = c + #w end
  print(fib(27), c)
end
