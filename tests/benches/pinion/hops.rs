//! The floor under a turn: what its three NATS hops cost when nobody does anything else. Plain blocking sockets to the
//! cluster's own server, one thread for each process of a turn, messages as long as the turn's.

use crate::turns::Failure;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Bytes of the first message that brings a token.
const CHUNK: usize = 128;
/// Bytes around the tokens of a submit and a run.
const AROUND: usize = 300;

struct Nats {
    socket: TcpStream,
    reader: BufReader<TcpStream>,
    payload: Vec<u8>,
}

impl Nats {
    /// Connects and subscribes.
    fn listen(address: &str, subject: &str) -> Result<Self, Failure> {
        let socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        let reader = BufReader::with_capacity(1 << 16, socket.try_clone()?);
        let mut nats = Self {
            socket,
            reader,
            payload: Vec::new(),
        };
        let hello = format!("CONNECT {{\"verbose\":false}}\r\nSUB {subject} 1\r\nPING\r\n");
        nats.socket.write_all(hello.as_bytes())?;
        let mut line = String::new();
        while line != "PONG\r\n" {
            nats.line(&mut line)?;
        }
        Ok(nats)
    }

    fn line(&mut self, line: &mut String) -> Result<(), Failure> {
        line.clear();
        match self.reader.read_line(line)? {
            0 => Err("NATS closed the connection".into()),
            _ => Ok(()),
        }
    }

    fn publish(&mut self, subject: &str, bytes: usize) -> Result<(), Failure> {
        let mut message = format!("PUB {subject} {bytes}\r\n").into_bytes();
        message.resize(message.len() + bytes, b'x');
        message.extend_from_slice(b"\r\n");
        Ok(self.socket.write_all(&message)?)
    }

    fn receive(&mut self) -> Result<usize, Failure> {
        let mut line = String::new();
        loop {
            self.line(&mut line)?;
            if line.starts_with("PING") {
                self.socket.write_all(b"PONG\r\n")?;
            } else if line.starts_with("MSG") {
                let bytes: usize = line.split_whitespace().last().unwrap_or_default().parse()?;
                self.payload.resize(bytes + 2, 0);
                self.reader.read_exact(&mut self.payload)?;
                return Ok(bytes);
            }
        }
    }
}

/// Three parties that pass a turn on.
pub struct Hops {
    gateway: Nats,
    /// Tokens of the prompt.
    tokens: usize,
}

impl Hops {
    /// For prompts of so many tokens. The other two end with the server.
    pub fn new(address: &str, tokens: usize) -> Result<Self, Failure> {
        let gateway = Nats::listen(address, &format!("bench.{tokens}.chunk"))?;
        for (from, to) in [("submit", "run"), ("run", "chunk")] {
            let mut party = Nats::listen(address, &format!("bench.{tokens}.{from}"))?;
            std::thread::spawn(move || {
                while let Ok(bytes) = party.receive() {
                    let bytes = if to == "chunk" { CHUNK } else { bytes };
                    if party.publish(&format!("bench.{tokens}.{to}"), bytes).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Self { gateway, tokens })
    }

    /// Submit, run and first chunk.
    pub fn turn(&mut self) -> Result<Duration, Failure> {
        let begun = Instant::now();
        let subject = format!("bench.{}.submit", self.tokens);
        self.gateway.publish(&subject, AROUND + 4 * self.tokens)?;
        self.gateway.receive()?;
        Ok(begun.elapsed())
    }
}
