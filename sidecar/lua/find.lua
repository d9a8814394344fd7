-- Find the records of one list that have a key text; nothing is written.
--
-- ARGV 9 text of the key   16 which list: 2 or 3 (KEYS)   17 how many entries to leave out, newest first
--      18 how many to look at   19 what the names of this list's records begin with
--
-- Replies
--   found  how many entries were looked at   then the names of those that have it
--
-- The records of a list share its hash tag, so each lies where the list lies, although KEYS cannot name it.

local from = tonumber(ARGV[17])
local names = redis.call('ZREVRANGE', KEYS[tonumber(ARGV[16])], from, from + tonumber(ARGV[18]) - 1)
local found = {'found', #names}
for _, name in ipairs(names) do
  -- What is no record of ours answers with an error, which equals no text.
  if redis.pcall('HGET', ARGV[19] .. name, 'key') == ARGV[9] then found[#found + 1] = name end
end
return found
