-- What every transition shares: reading, writing and listing one record. It is put before each script.
--
-- KEYS  1 the record  2 the list of unsettled records  3 the list of settled ones (all with one hash tag)
-- ARGV  1 owner token        2 fingerprint         3 its algorithm, or `off`   4 lease, ms
--       5 hold_for, ms       6 native key          7 digest of the credential  8 Accept-Encoding
--       9 text of the key   10 attempt            11 earlier attempt unknown: 1 or 0
--      12 first attempt, ms of the server's clock, 0 where TIME is denied
--      13 ms since the first attempt when this one was reserved, an upper bound (used where TIME is denied)
--      14 ms of the caller's clock, for the lists alone, where TIME is denied
--      15 the name of this record in the lists
--
-- A record is outstanding, completed or unknown. "Outstanding, lease over" is told by PTTL and never written:
-- `hold` less PTTL is the time since the last reserve, renew or change (semantics: the lease is never the expiry).

local VERSION = '1'
local FIELDS = {'v', 'state', 'owner', 'attempt', 'earlier', 'lease', 'hold', 'fp', 'alg', 'first', 'spent',
                'native', 'cred', 'why', 'seen', 'status'}

-- ms of the server's clock; nil where the account may not ask for TIME.
local function server_ms()
  local t = redis.pcall('TIME')
  if t.err then return nil end
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- The record as a table; nil where there is none; a table without `state` where it cannot be read.
local function read()
  local got = redis.pcall('HMGET', KEYS[1], unpack(FIELDS))
  if got.err then return {} end
  local record = {}
  for i, name in ipairs(FIELDS) do record[name] = got[i] or nil end
  if not record.v and redis.call('EXISTS', KEYS[1]) == 0 then return nil end
  if record.v ~= VERSION then return {} end
  record.lease, record.hold = tonumber(record.lease), tonumber(record.hold)
  record.attempt, record.first = tonumber(record.attempt), tonumber(record.first)
  record.spent, record.earlier = tonumber(record.spent), record.earlier == '1'
  local known = record.state == 'outstanding' or record.state == 'completed' or record.state == 'unknown'
  if not (known and record.owner and record.fp and record.alg and record.lease and record.hold
          and record.attempt and record.first and record.spent) then return {} end
  return record
end

-- ms since the last reserve, renew or change of an outstanding or unknown record.
local function since_change(record)
  return record.hold - redis.call('PTTL', KEYS[1])
end

-- Enter this record into list `i` (2 or 3) for `ms`, and take out up to 16 whose time is over, so that
-- a list is never longer than the records of its last window, and no call pays for many.
local function list(i, ms)
  local now = server_ms() or tonumber(ARGV[14])
  local other = i == 2 and 3 or 2
  redis.call('ZADD', KEYS[i], now + ms, ARGV[15])
  redis.call('ZREM', KEYS[other], ARGV[15])
  local over = redis.call('ZRANGEBYSCORE', KEYS[i], '-inf', now, 'LIMIT', 0, 16)
  if #over > 0 then redis.call('ZREM', KEYS[i], unpack(over)) end
  if redis.call('PTTL', KEYS[i]) < ms then redis.call('PEXPIRE', KEYS[i], ms) end
end

local function unlist()
  redis.call('ZREM', KEYS[2], ARGV[15])
  redis.call('ZREM', KEYS[3], ARGV[15])
end

-- Write the caller's record anew, in `state`. The HSET comes first: a full store refuses it before anything changed.
local function put(state, first, spent)
  redis.call('HSET', KEYS[1], 'v', VERSION, 'state', state, 'owner', ARGV[1], 'fp', ARGV[2], 'alg', ARGV[3],
             'lease', ARGV[4], 'hold', ARGV[5], 'native', ARGV[6], 'cred', ARGV[7], 'ae', ARGV[8], 'key', ARGV[9],
             'attempt', ARGV[10], 'earlier', ARGV[11], 'first', first, 'spent', spent)
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end

-- Nobody knows the outcome: the record stands for its full `hold` from now.
local function make_unknown(record, why, seen)
  redis.call('HSET', KEYS[1], 'state', 'unknown', 'why', why, 'seen', seen)
  redis.call('PEXPIRE', KEYS[1], record.hold)
  list(2, record.hold)
end
