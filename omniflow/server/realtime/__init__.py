"""/v1/realtime: spoken and written conversations over a WebSocket, by the GA protocol of OpenAI's Realtime API.

client_events    what clients send, and how it is read
server_events    what they are sent
settings         a session's settings, and how an update changes them
items            a conversation: its items, and the chat that they are for the graph
audio            sound as clients send and get it, and as the session keeps it (16 kHz)
turns            where a turn of speech begins and ends, given how likely each frame is speech
hearing          the user's side: sound in, turns found in it, items made of them
answers          a response while it is made: its items, and the events that tell of them
responses        the responses that run, and what each asks of the graph
protocol         all of these as one machine that does no I/O: events in, events and work out

silero, ears     the voice activity detector
outbox           what waits to be sent
connection       a session on its socket: two loops, and the tasks that the machine asks for
endpoint         who is let in, and with which settings
sockets          the sessions that are open, and their end when the server drains
wire             the WebSocket itself, cut off where nobody reads
client_secrets   keys for browsers
routes           where all this is found
"""
