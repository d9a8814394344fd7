-- Record a final answer, to be replayed for `ttl`.
--
-- ARGV 16 ttl, ms   17 ms since this attempt was reserved   18 a refusal (final, but no 2xx): 1 or 0
--      19 status   20 reason   21 fields   22 content kept: 1 or 0   23 content
--
-- Replies
--   completed   the answer stands in the record (repeated: it already did)
--   unknown     a refusal, but an earlier attempt may have sent a mail: it proves nothing
--   stale       not the owner, and nothing to add; or the record is gone for longer than its ttl
--
-- Transitions: outstanding or unknown, by the owner -> completed, or unknown; by a former owner, a 2xx -> completed
-- (a fact is added, whoever brings it); absent, by an owner younger than ttl -> completed, or unknown.

local record = read()
local refusal = ARGV[18] == '1'

local function complete()
  -- `why` and `seen` spoke of an outcome that is known now.
  redis.call('HSET', KEYS[1], 'state', 'completed', 'owner', ARGV[1], 'status', ARGV[19], 'reason', ARGV[20],
             'fields', ARGV[21], 'kept', ARGV[22], 'content', ARGV[23], 'ae', ARGV[8])
  redis.call('HDEL', KEYS[1], 'why', 'seen')
  redis.call('PEXPIRE', KEYS[1], ARGV[16])
  list(3, tonumber(ARGV[16]))
  return {'completed'}
end

if not record then
  -- Nobody knows what the store lost since: what this owner knows is put back.
  if tonumber(ARGV[17]) >= tonumber(ARGV[16]) then return {'stale'} end
  if refusal and ARGV[11] == '1' then
    put('unknown', ARGV[12], ARGV[13])
    make_unknown({hold = tonumber(ARGV[5])}, 'answer-lost', '')
    return {'unknown'}
  end
  put('completed', ARGV[12], ARGV[13])
  return complete()
end

if not record.state then return {'stale'} end

if record.state == 'completed' then
  return {record.owner == ARGV[1] and 'completed' or 'stale'}
end

if record.owner == ARGV[1] then
  if refusal and record.earlier then
    make_unknown(record, record.why or 'answer-lost', record.seen or '')
    return {'unknown'}
  end
  return complete()
end

if refusal then return {'stale'} end
return complete()
