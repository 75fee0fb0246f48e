# A server that closes its connections, and a client that waits for their ends. Prints the sum of the
# answers, and `late` if the ends come late.
import socket, sys, threading, time
def serve(listener):
    for number in range(ROUNDS):
        connection, _ = listener.accept()
        request = connection.recv(100)
        answer = sum(value * int(request) for value in range(3000))
        connection.sendall(b"%d\n" % answer)
        connection.close()
ROUNDS, late, total = 1500, [], 0
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=[listener]).start()
for number in range(ROUNDS):
    with socket.create_connection(listener.getsockname()) as connection:
        connection.sendall(b"%d" % number)
        answer = connection.recv(100)
        total += int(answer)
        got = time.monotonic()
        if connection.recv(100) != b"":
            sys.exit("more than an answer")
        late.append(time.monotonic() - got)
late.sort()
print(total)
print("end of a connection: %.0f us" % (late[ROUNDS // 2] * 1e6), file=sys.stderr)
if late[ROUNDS // 2] > 0.001:
    print("late")
