# A server that closes its connections, and a client that waits for their ends. Prints the sum of the
# answers, and `late` if the ends come later than other data. A busy machine delays both.
import socket, sys, threading, time


def serve(listener):
    for number in range(ROUNDS):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = connection.recv(100)
        answer = sum(value * int(request) for value in range(3000))
        connection.sendall(b"%20d" % answer)
        connection.sendall(b"!")
        connection.close()


def read(connection, length):
    got = b""
    while len(got) < length:
        more = connection.recv(length - len(got))
        if not more:
            sys.exit("less than an answer")
        got += more
    return got, time.monotonic()


ROUNDS, total = 1500, 0
data, ends = [], []
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=[listener]).start()
for number in range(ROUNDS):
    with socket.create_connection(listener.getsockname()) as connection:
        connection.sendall(b"%d" % number)
        answer, answered = read(connection, 20)
        total += int(answer)
        _, last = read(connection, 1)
        if connection.recv(100) != b"":
            sys.exit("more than an answer")
        data.append(last - answered)
        ends.append(time.monotonic() - last)
data, end = (sorted(all)[ROUNDS // 2] for all in (data, ends))
print(total)
print("data: %.0f us, end of a connection: %.0f us" % (data * 1e6, end * 1e6), file=sys.stderr)
if end > data + 0.001:
    print("late")
