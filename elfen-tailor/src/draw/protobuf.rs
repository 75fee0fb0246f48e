//! The part of Protobuf's encoding that a trace needs. A field is its number with its type, then a
//! number of variable length, or a length and as many bytes.

const NUMBER: u64 = 0;
const BYTES: u64 = 2;

/// A message in the making.
#[derive(Clone, Default, Debug)]
pub(super) struct Message(Vec<u8>);

impl Message {
    pub(super) fn number(mut self, field: u32, value: u64) -> Self {
        varint(&mut self.0, u64::from(field) << 3 | NUMBER);
        varint(&mut self.0, value);
        self
    }

    pub(super) fn text(self, field: u32, text: &str) -> Self {
        self.bytes(field, text.as_bytes())
    }

    pub(super) fn message(self, field: u32, message: &Self) -> Self {
        self.bytes(field, &message.0)
    }

    fn bytes(mut self, field: u32, bytes: &[u8]) -> Self {
        varint(&mut self.0, u64::from(field) << 3 | BYTES);
        varint(&mut self.0, bytes.len() as u64);
        self.0.extend(bytes);
        self
    }

    pub(super) fn encoded(&self) -> &[u8] {
        &self.0
    }
}

/// Seven bits a byte, the lowest first. The eighth bit says that more bytes follow.
fn varint(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let [low, ..] = value.to_le_bytes();
        value >>= 7;
        if value == 0 {
            out.push(low & 0x7f);
            return;
        }
        out.push(low | 0x80);
    }
}

/// A decoder for tests, written from the format's description.
#[cfg(test)]
pub(super) mod read {
    /// The content of a field.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(in crate::draw) enum Value {
        Number(u64),
        Bytes(Vec<u8>),
    }

    fn varint(bytes: &mut &[u8]) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = bytes.split_first()?;
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    /// The fields of a message, in their order; `None` if the bytes are not a message.
    pub(in crate::draw) fn fields(mut bytes: &[u8]) -> Option<Vec<(u64, Value)>> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes)?;
            let value = match key & 7 {
                0 => Value::Number(varint(&mut bytes)?),
                2 => {
                    let length = usize::try_from(varint(&mut bytes)?).ok()?;
                    let (content, rest) = bytes.split_at_checked(length)?;
                    bytes = rest;
                    Value::Bytes(content.to_vec())
                }
                _ => return None,
            };
            fields.push((key >> 3, value));
        }
        Some(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::read::{Value, fields};
    use super::*;

    /// The bytes are those of the format's own documentation.
    #[test]
    fn the_encoding_matches_the_format_description() {
        let message = Message::default().number(1, 150).text(2, "testing");
        let expected = [&[0x08, 0x96, 0x01, 0x12, 0x07][..], b"testing"].concat();
        assert_eq!(message.encoded(), expected);
        let outer = Message::default().message(3, &Message::default().number(1, u64::MAX));
        let inner = Value::Bytes([&[0x08][..], &[0xff; 9], &[0x01]].concat());
        assert_eq!(fields(outer.encoded()), Some(vec![(3, inner)]));
        assert_eq!(fields(&[0x12, 0x09, 0x00]), None);
    }
}
