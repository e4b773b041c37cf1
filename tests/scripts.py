"""The end of a training script, for tests that define a classifier `Net` of 8 numbers and 5 classes before it."""

TRAINS = """
def main():
    torch.manual_seed(0)
    model = Net()
    {before}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        x, y = torch.randn(4, 8), torch.randint(0, 5, (4,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
if __name__ == "__main__":
    main()
"""
