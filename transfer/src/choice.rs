//! Which RDMA devices a node uses, as its configuration says it, and why none can be used.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Devices of one node at most: what the largest machines have beside their GPUs.
pub const DEVICES_MAX: usize = 8;

/// One device: `mlx5_0`, `mlx5_0:1` or `mlx5_0:1:3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceName {
    /// Its name, as `ibv_devices` lists it.
    pub name: String,
    /// Its port. Default: the first active one.
    pub port: Option<u8>,
    /// Place in the port's table of GIDs. Default: the first `RoCE` v2 one with an IPv4 address; on InfiniBand 0.
    pub gid_index: Option<u8>,
}

/// `auto`: the first device with an active port, if there is one. `off`: none. Else names of devices, separated by commas, all of which must be there:
/// the pages of a transfer are dealt over them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Choice {
    /// The first that works.
    Auto,
    /// None.
    Off,
    /// These.
    Named(Vec<DeviceName>),
}

/// Not a choice of devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} names no RDMA devices: say auto, off, or up to {DEVICES_MAX} of NAME, NAME:PORT or NAME:PORT:GID_INDEX, with commas between"
)]
pub struct BadChoice(String);

/// Why there are no devices to use.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The feature is off.
    #[error("this program was built without RDMA: build it with `--features verbs`")]
    NotBuilt,
    /// No library, or no kernel support.
    #[error("RDMA devices cannot be listed: {0}; is rdma-core (libibverbs) installed?")]
    List(String),
    /// None has a port that works.
    #[error("no RDMA device has an active port with an address; `ibv_devinfo -v` shows them")]
    None,
    /// Not one of this machine's.
    #[error("there is no RDMA device {name}; here are: {here}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        here: String,
    },
    /// It cannot be used.
    #[error("RDMA device {device} cannot be used: {what}")]
    Unusable {
        /// Its name.
        device: String,
        /// Why.
        what: String,
    },
}

impl FromStr for DeviceName {
    type Err = BadChoice;

    fn from_str(text: &str) -> Result<Self, BadChoice> {
        let bad = || BadChoice(text.chars().take(200).collect());
        let mut parts = text.trim().split(':');
        let name = parts.next().filter(|n| !n.is_empty()).ok_or_else(bad)?;
        let mut number = || parts.next().map(|p| p.parse().map_err(|_| bad())).transpose();
        let (port, gid_index) = (number()?, number()?);
        if parts.next().is_some() {
            return Err(bad());
        }
        Ok(Self {
            name: name.to_owned(),
            port,
            gid_index,
        })
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        // A GID's place cannot be said without the port.
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
            if let Some(gid_index) = self.gid_index {
                write!(f, ":{gid_index}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for Choice {
    type Err = BadChoice;

    fn from_str(text: &str) -> Result<Self, BadChoice> {
        match text.trim() {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            names => {
                let names: Vec<DeviceName> = names.split(',').map(str::parse).collect::<Result<_, _>>()?;
                if names.len() > DEVICES_MAX {
                    return Err(BadChoice(text.chars().take(200).collect()));
                }
                Ok(Self::Named(names))
            }
        }
    }
}

impl TryFrom<String> for Choice {
    type Error = BadChoice;
    fn try_from(text: String) -> Result<Self, BadChoice> {
        text.parse()
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Off => write!(f, "off"),
            Self::Named(names) => {
                let names: Vec<String> = names.iter().map(ToString::to_string).collect();
                write!(f, "{}", names.join(","))
            }
        }
    }
}

impl From<Choice> for String {
    fn from(choice: Choice) -> Self {
        choice.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_are_written() {
        for text in ["auto", "off", "rxe0", "mlx5_0:1:3,mlx5_1", "mlx5_0:2"] {
            assert_eq!(text.parse::<Choice>().map(|c| c.to_string()), Ok(text.to_owned()));
        }
        let both = "rxe0:1:3, rxe1".parse::<Choice>();
        let device = |name: &str, port, gid_index| DeviceName {
            name: name.to_owned(),
            port,
            gid_index,
        };
        assert_eq!(
            both,
            Ok(Choice::Named(vec![
                device("rxe0", Some(1), Some(3)),
                device("rxe1", None, None)
            ]))
        );
        let many = ["rxe"; DEVICES_MAX + 1].join(",");
        for bad in ["", ",", "rxe0:x", "rxe0:1:2:3", "rxe0:256", many.as_str()] {
            let error = bad.parse::<Choice>().unwrap_err();
            assert!(error.to_string().contains("NAME:PORT"), "{error}");
        }
    }
}
