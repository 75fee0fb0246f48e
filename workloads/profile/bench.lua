-- Recursion, objects, strings and arrays, for `elfen lab bench fdo` of Lua: bench.lua ROUNDS
local n = tonumber(arg and arg[1]) or 1
local function fib(x) if x < 2 then return x end return fib(x-1)+fib(x-2) end
local Point = {}; Point.__index = Point
local function new(x, y) return setmetatable({x=x, y=y}, Point) end
function Point:add(o) return new(self.x + o.x, self.y + o.y) end
local out = {}
for r = 1, n do
  local t = {}
  for i = 1, 60000 do t[i] = (i * 7919) % 100003 end
  table.sort(t, function(a, b) return a < b end)
  local s = {}
  for i = 1, 20000 do s[#s+1] = string.format("%d:%s", t[i], tostring(i)) end
  local c = 0
  for w in table.concat(s, ","):gmatch("%d+:") do c = c + #w end
  local p = new(0, 0)
  for i = 1, 100000 do p = p:add(new(i, -i)) end
  local sieve, primes = {}, 0
  for i = 2, 100000 do
    if not sieve[i] then
      primes = primes + 1
      for j = i * i, 100000, i do sieve[j] = true end
    end
  end
  out[#out+1] = fib(24) + c + p.x + primes
end
print(out[#out])
