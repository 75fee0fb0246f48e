//! Goal: the report names the function behind slow requests that work for longer than others.
//! Method: a service that runs another function in each 60th request.

use std::process::Command;

use crate::served::{GET, Load, record, report, start_with_port};

const SERVICE: &str = r#"
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
static volatile unsigned sum;
#define LOOP(name, factor) __attribute__((noipa)) static void name(unsigned rounds) \
    { for (unsigned i = 0; i < rounds; i++) sum = sum * factor + i; }
LOOP(usual, 3)
LOOP(merge_postings, 5)
int main(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f000001)};
    struct pollfd all[64] = {{.fd = socket(AF_INET, SOCK_STREAM, 0), .events = POLLIN}};
    socklen_t length = sizeof at;
    unsigned count = 1, requests = 0;
    char bytes[4096];
    if (bind(all[0].fd, (void *)&at, sizeof at) || listen(all[0].fd, 64))
        return 1;
    getsockname(all[0].fd, (void *)&at, &length);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    while (poll(all, count, -1) > 0) {
        if (all[0].revents && count < 64)
            all[count++] = (struct pollfd){.fd = accept(all[0].fd, 0, 0), .events = POLLIN};
        for (unsigned i = 1; i < count; i++) {
            if (!(all[i].revents & POLLIN))
                continue;
            if (read(all[i].fd, bytes, sizeof bytes) <= 0)
                return 0;
            usual(300000);
            if (++requests % 60 == 0)
                merge_postings(20000000);
            if (write(all[i].fd, "done", 4) != 4)
                return 0;
        }
    }
}
"#;

#[test]
#[ignore = "needs root and eBPF"]
fn the_function_behind_long_requests_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("service.c"), folder.path().join("service"));
    std::fs::write(&source, SERVICE).unwrap();
    let built = Command::new("cc").args(["-O1", "-o"]).args([&program, &source]).status();
    assert!(built.unwrap().success());
    let (service, port) = start_with_port(&mut Command::new(&program), "the service");
    let load = Load::start(port, GET, |answer| answer == b"done");
    let recording = folder.path().join("long.trace");
    let recording = recording.to_str().unwrap();
    record(&["--port", &port.to_string(), "-d", "8s"], recording);
    load.end();
    drop(service);
    let report = report(recording, &["--slow", "8ms"]);
    let first = &report["long_code"]["functions"][0];
    assert_eq!(first["function"], "merge_postings", "{:#}", report["long_code"]);
    assert!(first["share"].as_f64().unwrap() > 0.5, "{first:#}");
}
