-- Show one record to the operator; nothing is written.
--
-- ARGV 16 the answer too: 1 or 0
--
-- Replies
--   absent
--   unreadable  ms until it expires (-1: never)
--   record      ms until it expires   the server's clock, ms (0: TIME is denied)   bytes of content
--               then SHOWN in that order, each a text, '' where it is absent
--               then, where asked for, reason, fields and content of the answer

local SHOWN = {'state', 'owner', 'attempt', 'earlier', 'lease', 'hold', 'alg', 'first', 'why', 'seen', 'status', 'key',
               'kept', 'resolved', 'pid'}

local record = read()

if not record then return {'absent'} end
local left = redis.call('PTTL', KEYS[1])
if not record.state then return {'unreadable', left} end

local shown = {'record', left, server_ms() or 0, redis.call('HSTRLEN', KEYS[1], 'content')}
local function show(names)
  for i, value in ipairs(redis.call('HMGET', KEYS[1], unpack(names))) do shown[#shown + 1] = value or '' end
end
show(SHOWN)
if ARGV[16] == '1' then show({'reason', 'fields', 'content'}) end
return shown
